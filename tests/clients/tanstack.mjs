// TanStack AI and the client of Durable Streams, over cut connections and a killed engine.

import assert from 'node:assert/strict';
import { readFileSync, readdirSync } from 'node:fs';
import { createServer as createHttpServer } from 'node:http';
import { Readable } from 'node:stream';
import { after, test } from 'node:test';
import { stream } from '@durable-streams/client';
import { chat, memoryStream, toServerSentEventsResponse, toolDefinition } from '@tanstack/ai';
import { fetchServerSentEvents } from '@tanstack/ai-client';
import { openaiCompatibleText } from '@tanstack/ai-openai/compatible';
import { closeAll, cutter, listening } from './cutter.mjs';
import { resumingFetch } from './resuming_fetch.mjs';

const server = new URL(process.env.HEADRACE_TEST_URL);
const question = [{ role: 'user', content: 'Count from 1 to 60.' }];
const counted = Array.from({ length: 60 }, (_, index) => index + 1).join(', ');
after(closeAll);

function killEngine() {
  const pid = process.env.HEADRACE_TEST_PID;
  const children = readdirSync(`/proc/${pid}/task`).flatMap((task) =>
    readFileSync(`/proc/${pid}/task/${task}/children`, 'utf8').split(' ').filter(Boolean),
  );
  const isEngine = (it) => readFileSync(`/proc/${it}/cmdline`, 'utf8').includes('_engine');
  process.kill(Number(children.find(isEngine)), 'SIGKILL');
}

function adapter(baseURL, api, more = {}) {
  const options = { baseURL: `${baseURL}/v1`, apiKey: 'unused', maxRetries: 0, api, ...more };
  return openaiCompatibleText('headrace-mini', options);
}

const within = { timeout: 60_000 };
const asked = { messages: question, modelOptions: { temperature: 0 } };

// The text of a run. If `kills`, its engine is killed after ten pieces.
async function textOf(run, kills = false) {
  let [text, pieces] = ['', 0];
  for await (const chunk of run) {
    assert.notEqual(chunk.type, 'RUN_ERROR', JSON.stringify(chunk));
    if (chunk.type !== 'TEXT_MESSAGE_CONTENT') continue;
    text += chunk.delta;
    if (++pieces === 10 && kills) killEngine();
  }
  return text;
}

for (const api of ['chat-completions', 'responses']) {
  test(`a chat over ${api} is whole although its connection is cut`, within, async () => {
    const cuts = [9000, 20000, 0];
    const url = await cutter(server.origin, cuts);
    const run = chat({ ...asked, adapter: adapter(url, api, { fetch: resumingFetch }) });
    assert.equal(await textOf(run, api === 'responses'), counted);
    assert.equal(cuts.length, 0);
  });

  test(`a tool is called over ${api}`, within, async () => {
    const city = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
    const definition = { name: 'get_weather', description: 'Tells the weather', inputSchema: city };
    const cities = [];
    const tool = toolDefinition(definition).server((given) => {
      cities.push(given.city);
      return { weather: 'sunny' };
    });
    const messages = [{ role: 'user', content: 'What is the weather in Rome?' }];
    const run = chat({ ...asked, adapter: adapter(server.origin, api), messages, tools: [tool] });
    assert.equal(await textOf(run), 'The weather in Rome is sunny.');
    assert.deepEqual(cities, ['Rome']);
  });
}

test("a browser's run survives cuts on both sides of the app and a killed engine", within, async () => {
  const [cuts, appCuts] = [[9000], [6000, 9000]];
  const url = await cutter(server.origin, cuts);
  const model = adapter(url, 'chat-completions', { fetch: resumingFetch });
  const app = createHttpServer(async (request, answer) => {
    const { method, headers } = request;
    const given = new Request(`http://app${request.url}`, { method, headers });
    const durability = { adapter: memoryStream(given) };
    const made = toServerSentEventsResponse(chat({ ...asked, adapter: model }), { durability });
    answer.writeHead(made.status, Object.fromEntries(made.headers));
    Readable.fromWeb(made.body).on('error', () => answer.destroy()).pipe(answer);
  });
  const browser = fetchServerSentEvents(await cutter(await listening(app), appCuts));
  const context = { threadId: 'thread', runId: 'run' };
  const run = browser.connect([{ id: 'm', role: 'user', parts: [] }], {}, undefined, context);
  assert.equal(await textOf(run, true), counted);
  assert.equal(cuts.length + appCuts.length, 0);
});

for (const live of ['sse', 'long-poll']) {
  test(`the client of Durable Streams reads a chat by ${live}`, within, async () => {
    const body = { messages: question, temperature: 0, stream: true };
    const headers = { 'Content-Type': 'application/json', 'Idempotency-Key': crypto.randomUUID() };
    const posted = `${server.origin}/v1/chat/completions`;
    const begun = await fetch(posted, { method: 'POST', headers, body: JSON.stringify(body) });
    const id = begun.headers.get('X-Stream-Id');
    await begun.body.cancel();
    const cuts = [3000, 6000, 0];
    const url = `${await cutter(server.origin, cuts)}/v1/durable/${id}`;
    const events = [];
    let [offset, isClosed, isKilled] = ['-1', false, live === 'long-poll'];
    while (!isClosed) {
      try {
        const response = await stream({ url, offset, live });
        await new Promise((resolve, reject) => {
          response.closed.catch(reject);
          response.subscribeJson((batch) => {
            events.push(...batch.items);
            ({ offset } = batch);
            if (events.length > 10 && !isKilled) killEngine(), (isKilled = true);
            if ((isClosed = batch.streamClosed)) resolve();
          });
        });
      } catch (error) {
        assert.ok(!(error.status >= 400), error);
      }
    }
    assert.deepEqual(events.map((event) => event.seq), [...events.keys()]);
    assert.equal(events.flatMap((it) => it.pieces ?? []).map((it) => it.text).join(''), counted);
    assert.ok(isKilled && cuts.length === 0);
  });
}
