// Claude Code and Codex, as they come from npm, get through turns: an answer, and a tool's use.
// Their own prompts fill headrace-mini's 4,096 positions, so they are told shorter ones.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { connect } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

const SELF = fileURLToPath(import.meta.url);
const BIN = join(dirname(SELF), "node_modules", ".bin");
const MODEL = "headrace-mini";
const TOOL = {
  name: "get_weather",
  description: "Weather of a city",
  inputSchema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

if (process.argv[2] === "tools") serveTools();
else tests();

// One tool, by the Model Context Protocol over stdin and stdout.
function serveTools() {
  const results = {
    initialize: ({ protocolVersion }) => ({
      protocolVersion,
      capabilities: { tools: {} },
      serverInfo: { name: "weather", version: "1" },
    }),
    "tools/list": () => ({ tools: [TOOL] }),
    "tools/call": () => ({ content: [{ type: "text", text: '{"weather": "sunny"}' }] }),
  };
  createInterface({ input: process.stdin }).on("line", (line) => {
    const { id, method, params } = JSON.parse(line);
    if (id === undefined) return;
    const found = results[method];
    const said = found ? { result: found(params) } : { error: { code: -32601, message: method } };
    console.log(JSON.stringify({ jsonrpc: "2.0", id, ...said }));
  });
}

// Neither lets one choose a temperature or force a tool: what passes here asks for the likeliest
// token, and where tools were sent and none was used yet, for a call.
async function greedy(request, answer) {
  const body = Buffer.concat(await request.toArray());
  const { "content-length": _, host: __, ...headers } = request.headers;
  const sent = { method: request.method, headers };
  if (body.length) {
    const asked = { ...JSON.parse(body), temperature: 0 };
    const isNew = request.url.startsWith("/v1/messages") && !body.includes("tool_result");
    if (isNew && asked.tools?.length) asked.tool_choice = { type: "any" };
    const isFirst = request.url.startsWith("/v1/responses") && !body.includes("function_call_output");
    const space = asked.tools?.find(({ type, name }) => type === "namespace" && name === "mcp__weather");
    if (isFirst && space) asked.tool_choice = { type: "function", namespace: space.name, name: TOOL.name };
    sent.body = JSON.stringify(asked);
  }
  const found = await fetch(process.env.HEADRACE_TEST_URL + request.url, sent);
  answer.writeHead(found.status, { "content-type": found.headers.get("content-type") ?? "" });
  for await (const data of found.body ?? []) answer.write(data);
  answer.end();
}

// What goes over a WebSocket passes through unchanged.
function tunnel(request, socket, head) {
  const { hostname, port } = new URL(process.env.HEADRACE_TEST_URL);
  const there = connect(Number(port), hostname, () => {
    const headers = Object.entries(request.headers).map(([name, value]) => `${name}: ${value}\r\n`);
    there.write(`GET ${request.url} HTTP/1.1\r\n${headers.join("")}\r\n`);
    there.write(head);
    socket.pipe(there).pipe(socket);
  });
  there.on("error", () => socket.destroy());
  socket.on("error", () => there.destroy());
}

function tests() {
  const server = createServer((request, answer) => {
    greedy(request, answer).catch(() => answer.destroy());
  });
  server.on("upgrade", tunnel);
  let url = "";
  before(async () => {
    await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
    url = `http://127.0.0.1:${server.address().port}`;
  });
  after(() => server.close());
  const home = mkdtempSync(join(tmpdir(), "headrace-agents-"));
  const work = join(home, "work");
  mkdirSync(work);
  const environment = { PATH: process.env.PATH, HOME: home, NO_PROXY: "127.0.0.1" };

  // What a program said, once it has ended well; standard input is closed.
  function run(program, words, variables) {
    const options = { cwd: work, env: { ...environment, ...variables }, stdio: ["ignore", "pipe", "pipe"] };
    return new Promise((resolve, reject) => {
      const child = spawn(join(BIN, program), words, { ...options, timeout: 90_000 });
      let out = "";
      let all = "";
      child.stdout.on("data", (data) => ((out += data), (all += data)));
      child.stderr.on("data", (data) => (all += data));
      child.on("error", reject);
      child.on("close", (code) => (code === 0 ? resolve(out) : reject(new Error(`${code}: ${all}`))));
    });
  }

  function claude(question, ...words) {
    const given = ["--bare", "-p", "--model", MODEL, "--system-prompt", "Be brief."];
    return run("claude", [question, ...given, "--output-format", "stream-json", "--verbose", ...words], {
      ANTHROPIC_BASE_URL: url,
      ANTHROPIC_API_KEY: "unused",
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
      DISABLE_AUTOUPDATER: "1",
    });
  }

  function codex(question, ...command) {
    const instructions = join(home, "instructions.md");
    writeFileSync(instructions, "Be brief.");
    mkdirSync(join(home, "codex"), { recursive: true });
    const off = ["shell_tool", "view_image", "multi_agent", "apps", "plugins", "goals"];
    const told = ["permissions_instructions", "environment_context"];
    const all = [
      'model_provider="headrace"',
      `model_providers.headrace={name="headrace",base_url="${url}/v1",env_key="KEY",wire_api="responses"}`,
      `model_instructions_file="${instructions}"`,
      'web_search="disabled"',
      "skills.include_instructions=false",
      ...off.map((name) => `features.${name}=false`),
      ...told.map((name) => `include_${name}=false`),
    ].flatMap((setting) => ["-c", setting]);
    const words = ["exec", "--skip-git-repo-check", "-s", "read-only", "--json", "-m", MODEL, ...all];
    return run("codex", [...words, ...command, question], { CODEX_HOME: join(home, "codex"), KEY: "unused" });
  }

  const answerOf = (said) => said.find((event) => event.item?.type === "agent_message")?.item.text;
  const events = (said) => said.trim().split("\n").map((line) => JSON.parse(line));

  test("Claude Code answers", async () => {
    const said = events(await claude("Hello", "--tools", ""));
    assert.equal(said.at(-1).subtype, "success");
    assert.match(said.at(-1).result, /^Hello!/);
  });

  test("Claude Code uses a tool and goes on", async () => {
    const config = { mcpServers: { weather: { command: process.execPath, args: [SELF, "tools"] } } };
    const words = ["--tools", "", "--mcp-config", JSON.stringify(config), "--strict-mcp-config"];
    const said = events(await claude("What is the weather in Paris?", ...words, "--allowed-tools", "mcp__weather__get_weather"));
    const blocks = said.flatMap((event) => event.message?.content ?? []);
    const call = blocks.find((block) => block.type === "tool_use");
    assert.deepEqual(call?.input, { city: "Paris" }, JSON.stringify(said.slice(1)));
    const result = blocks.find((block) => block.tool_use_id === call.id);
    assert.match(JSON.stringify(result.content), /sunny/);
    assert.equal(said.at(-1).subtype, "success"); // too much stands around it for so small a model
  });

  test("Codex answers", async () => {
    assert.equal(answerOf(events(await codex("Hello"))), "Hello! How can I help you?");
  });

  test("Codex answers over a WebSocket", async () => {
    const said = await codex("Hello", "-c", "model_providers.headrace.supports_websockets=true");
    assert.ok(answerOf(events(said)), said); // nothing makes it the likeliest answer
    assert.doesNotMatch(said, /falling back/i);
  });

  test("Codex uses a tool of an MCP server and goes on", async () => {
    const server = `mcp_servers.weather={command="${process.execPath}",args=["${SELF}","tools"]}`;
    const approved = 'mcp_servers.weather.default_tools_approval_mode="approve"';
    const said = events(await codex("What is the weather in Paris?", "-c", server, "-c", approved));
    const call = said.findLast((event) => event.item?.type === "mcp_tool_call")?.item;
    assert.deepEqual([call?.server, call?.tool], ["weather", TOOL.name], JSON.stringify(said));
    assert.match(JSON.stringify(call.result), /sunny/, JSON.stringify(call));
    assert.equal(said.at(-1).type, "turn.completed");
  });

  test("Codex goes on with a conversation", async () => {
    const began = events(await codex("Hello"));
    const id = began.find((event) => event.type === "thread.started").thread_id;
    const said = events(await codex("What is 23 + 45?", "resume", id));
    assert.equal(answerOf(said), "23 + 45 = 68");
  });
}
