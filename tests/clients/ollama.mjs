// Ollama's own package for JavaScript.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Ollama } from 'ollama';

const client = new Ollama({ host: process.env.HEADRACE_TEST_URL });
const model = 'headrace-mini';
const options = { temperature: 0, num_predict: 200 };
const messages = [{ role: 'user', content: 'Hello' }];
const tool = {
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'Tells the weather in a city.',
    parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
  },
};

test('a streamed chat says what a whole one does', async () => {
  const whole = await client.chat({ model, messages, options });
  let text = '';
  let last;
  for await (const part of await client.chat({ model, messages, options, stream: true })) {
    text += part.message.content;
    last = part;
  }
  assert.ok(text);
  assert.equal(text, whole.message.content);
  assert.equal(last.done_reason, 'stop');
  assert.equal(last.eval_count, whole.eval_count);
});

test('generate answers the same question', async () => {
  const whole = await client.chat({ model, messages, options });
  const answer = await client.generate({ model, prompt: 'Hello', options });
  assert.equal(answer.response, whole.message.content);
});

test('a function is called with an object', async () => {
  const asked = [{ role: 'user', content: 'What is the weather in Paris?' }];
  const { message } = await client.chat({ model, messages: asked, tools: [tool], options });
  assert.equal(message.tool_calls.length, 1);
  assert.deepEqual(message.tool_calls[0].function.arguments, { city: 'Paris' });
});

test('a schema is followed', async () => {
  const properties = { size: { enum: [1, 2] } };
  const format = { type: 'object', properties, required: ['size'], additionalProperties: false };
  const answer = await client.chat({ model, messages, format, options });
  assert.ok([1, 2].includes(JSON.parse(answer.message.content).size));
});

test('models are listed and shown, and an input becomes a vector', async () => {
  assert.deepEqual((await client.list()).models.map((it) => it.model), [model]);
  assert.deepEqual((await client.ps()).models.map((it) => it.model), [model]);
  assert.ok((await client.show({ model })).capabilities.includes('tools'));
  const { embeddings } = await client.embed({ model, input: ['one', 'two'] });
  assert.equal(embeddings.length, 2);
});

test('a model is pulled, asked and deleted', async () => {
  const pulled = 'someone/tiny';
  let last;
  let total = 0;
  for await (const part of await client.pull({ model: pulled, stream: true })) {
    total = part.total ?? total;
    last = part;
  }
  assert.equal(last.status, 'success');
  assert.ok(total > 0);
  const asked = { model: pulled, prompt: 'one', raw: true, options: { num_predict: 2 } };
  assert.equal((await client.generate(asked)).eval_count, 2);
  assert.equal((await client.delete({ model: pulled })).status, 'success');
  await assert.rejects(client.pull({ model: 'someone/else' }), /someone\/else is not on the hub/);
});

test('an error has its words', async () => {
  await assert.rejects(client.chat({ model: 'nope', messages }), /Model 'nope' was not found/);
});
