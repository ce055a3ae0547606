// The Vercel AI SDK, with its providers for servers that speak OpenAI's API and Anthropic's, and
// Anthropic's own package.

import assert from 'node:assert/strict';
import { after, beforeEach, test } from 'node:test';
import { createAnthropic } from '@ai-sdk/anthropic';
import Anthropic from '@anthropic-ai/sdk';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { closeAll, cutter } from './cutter.mjs';
import { resumingFetch } from './resuming_fetch.mjs';

const url = `${process.env.HEADRACE_TEST_URL}/v1`;
const provider = createOpenAICompatible({
  name: 'headrace',
  baseURL: url,
  apiKey: 'unused',
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider('headrace-mini'), temperature: 0, maxRetries: 0 };
const cities = [];
const tools = {
  get_weather: tool({
    description: 'Tells the weather in a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return { weather: 'sunny' };
    },
  }),
};
const loop = { ...asked, tools, stopWhen: stepCountIs(3) };
const hello = [{ role: 'user', content: 'Hello' }];
const thinking = { headrace: { chat_template_kwargs: { enable_thinking: true } } };

beforeEach(() => {
  cities.length = 0;
});

function post(route, body) {
  const headers = { 'Content-Type': 'application/json' };
  return fetch(url + route, { method: 'POST', headers, body: JSON.stringify(body) });
}

// Why tests of what only grammars can enforce are skipped, if they are.
async function withoutGrammars() {
  const json_schema = { name: 'it', schema: { type: 'object' } };
  const response_format = { type: 'json_schema', json_schema };
  const body = { messages: hello, response_format, max_tokens: 1 };
  const { error } = await (await post('/chat/completions', body)).json();
  const isUnsupported = error?.code === 'unsupported_parameter';
  return isUnsupported && `the server has no grammars: ${error.message}`;
}
const skip = await withoutGrammars();

// Every place of the server is taken for 2.5 s, so that one who asks hears heartbeats first.
async function makeBusy() {
  const prompt = Array(8).fill('Once');
  const answer = await post('/completions', {
    prompt,
    max_tokens: -1,
    ignore_eos: true,
    stream: true,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  while (!/"text":"[^"]/.test(text)) text += (await reader.read()).value;
  const over = Date.now() + 2500;
  const free = async () => {
    while (Date.now() < over) await reader.read();
    await reader.cancel();
  };
  return { isFree: free() };
}

async function streamed(options) {
  const stream = streamText({ ...options, onError: () => {} });
  const parts = [];
  for await (const part of stream.fullStream) {
    if (part.type === 'error') throw part.error;
    parts.push(part);
  }
  return { parts, text: await stream.text, usage: await stream.totalUsage };
}

test('a model answers', async () => {
  const { text, usage } = await generateText({ ...asked, prompt: 'Hello' });
  assert.equal(text, 'Hello! How can I help you?');
  assert.ok(usage.outputTokens > 5);
});

test('a stream answers', async () => {
  const { text, usage } = await streamed({ ...asked, prompt: 'Count from 1 to 5.' });
  assert.equal(text, '1, 2, 3, 4, 5');
  assert.ok(usage.outputTokens > 5);
});

test('a tool is called and its result answered', async () => {
  const prompt = 'What is the weather in Paris?';
  const { text, steps } = await generateText({ ...loop, prompt });
  assert.deepEqual(cities, ['Paris']);
  assert.deepEqual([text, steps.length], ['The weather in Paris is sunny.', 2]);
});

test('a tool is called in a stream and its result answered', async () => {
  const { text, parts } = await streamed({ ...loop, prompt: 'What is the weather in Rome?' });
  assert.deepEqual(cities, ['Rome']);
  assert.equal(text, 'The weather in Rome is sunny.');
  const called = parts.filter((part) => part.type === 'tool-call');
  assert.deepEqual(called.map((part) => part.input), [{ city: 'Rome' }]);
});

test('reasoning is apart from the answer', async () => {
  const prompt = 'What is 23 + 45?';
  const options = { ...asked, prompt, providerOptions: thinking };
  const { text, reasoningText } = await generateText(options);
  assert.equal(text, '23 + 45 = 68');
  assert.match(reasoningText, /63/);
  const { parts } = await streamed(options);
  const thought = parts.filter((part) => part.type === 'reasoning-delta');
  assert.equal(thought.map((part) => part.text).join(''), reasoningText);
});

test('an error says what is wrong', async () => {
  const failing = generateText({ ...asked, prompt: 'x '.repeat(9000) });
  await assert.rejects(failing, /maximum context length is 4096/);
});

test('who leaves a stream is not waited for', async () => {
  const leaving = new AbortController();
  const prompt = 'Count from 1 to 600.';
  const stream = streamText({ ...asked, prompt, abortSignal: leaving.signal });
  for await (const part of stream.fullStream) if (part.type === 'text-delta') leaving.abort();
  const { text } = await generateText({ ...asked, prompt: 'Hello' });
  assert.ok(text);
});

test('heartbeats disturb no stream', async () => {
  const { isFree } = await makeBusy();
  const began = Date.now();
  const { text } = await streamed({ ...loop, prompt: 'What is the weather in Rome?' });
  assert.ok(Date.now() - began > 2000);
  assert.equal(text, 'The weather in Rome is sunny.');
  await isFree;
});

test('a stream is whole although its connection is cut', async () => {
  const cuts = [3000, 6000, 0];
  const baseURL = `${await cutter(process.env.HEADRACE_TEST_URL, cuts)}/v1`;
  const cut = createOpenAICompatible({ name: 'cut', baseURL, fetch: resumingFetch });
  const prompt = 'Count from 1 to 60.';
  const { text } = await streamed({ ...asked, model: cut('headrace-mini'), prompt });
  assert.equal(text, Array.from({ length: 60 }, (_, index) => index + 1).join(', '));
  assert.equal(cuts.length, 0);
});
after(closeAll);

test('an answer has the shape that was asked for', { skip }, async () => {
  const schema = z.object({ name: z.string(), age: z.number() });
  const prompt = 'Answer as JSON with the keys name and age: Anna is 34 years old.';
  const { output } = await generateText({ ...asked, prompt, output: Output.object({ schema }) });
  assert.deepEqual(Object.keys(output).sort(), ['age', 'name']);
});

test('a forced call is made', { skip }, async () => {
  const { toolCalls } = await generateText({
    ...asked,
    tools,
    prompt: 'Hello',
    toolChoice: 'required',
    maxOutputTokens: 200,
  });
  assert.equal(toolCalls.length, 1);
  assert.equal(cities.length, 1);
});

const sum = [{ role: 'user', content: 'What is 23 + 45?' }];

test("signs of life disturb no stream of Anthropic's API", async () => {
  const anthropic = createAnthropic({ baseURL: url, apiKey: 'unused' });
  const busy = await makeBusy();
  const { text } = streamText({ ...asked, model: anthropic('headrace-mini'), messages: sum });
  assert.equal(await text, '23 + 45 = 68');
  await busy.isFree;
});

test("signs of life disturb no stream of Anthropic's package, which hears them", async () => {
  const client = new Anthropic({ baseURL: process.env.HEADRACE_TEST_URL, apiKey: 'unused', maxRetries: 0 });
  const busy = await makeBusy();
  // the package has no argument for a temperature any more
  const stream = client.messages.stream(
    { model: 'headrace-mini', max_tokens: 40, messages: sum, temperature: 0 },
  );
  let signs = 0;
  stream.on('streamEvent', (event) => (signs += event.delta?.text === ''));
  assert.equal((await stream.finalMessage()).content[0].text, '23 + 45 = 68');
  assert.ok(signs > 0);
  await busy.isFree;
});
