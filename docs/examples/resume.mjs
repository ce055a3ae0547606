// Streams an answer by bytes and survives any loss of the connection. Node 18 or later, no packages.
//
//   node docs/examples/resume.mjs http://127.0.0.1:8000 "Count from 1 to 20."
//
// The conversation id makes every byte of the body addressable: after a cut, ask from the next one.

import { randomUUID } from 'node:crypto';

const [url, prompt] = process.argv.slice(2);
if (!url?.startsWith('http') || !prompt) {
  console.error('usage: node resume.mjs URL PROMPT, with a URL such as http://127.0.0.1:8000');
  process.exit(2);
}
const conversation = randomUUID();
const body = { messages: [{ role: 'user', content: prompt }], stream: true };
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const decoder = new TextDecoder();
let received = 0; // bytes
let rest = ''; // of a frame that is not whole yet
let hasEnded = false;

function ask() {
  if (received) {
    return fetch(`${url}/v1/stream?conv_id=${encodeURIComponent(conversation)}&from=${received}`);
  }
  const headers = {
    'Content-Type': 'application/json',
    'X-Conversation-Id': conversation,
    'Idempotency-Key': conversation, // so that a repeated POST is the same request
  };
  return fetch(`${url}/v1/chat/completions`, { method: 'POST', headers, body: JSON.stringify(body) });
}

function show(frame) {
  const data = frame.split('\n').find((line) => line.startsWith('data: '))?.slice(6);
  if (!data) return;
  hasEnded = data === '[DONE]';
  const chunk = hasEnded ? {} : JSON.parse(data);
  if (chunk.error) throw new Error(`${chunk.error.code}: ${chunk.error.message}`);
  process.stdout.write(chunk.choices?.[0]?.delta?.content ?? '');
}

async function read() {
  const response = await ask();
  if (response.status === 429 || response.status === 503) {
    await wait(Number(response.headers.get('retry-after-ms')));
    return;
  }
  if (!response.ok) throw new Error(await response.text());
  for await (const bytes of response.body) {
    received += bytes.length;
    const frames = (rest + decoder.decode(bytes, { stream: true })).split('\n\n');
    rest = frames.pop();
    frames.forEach(show);
  }
}

for (let pause = 250; !hasEnded; pause = Math.min(2 * pause, 5000)) {
  const before = received;
  try {
    await read();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // fetch's own: the connection was lost
  }
  if (received > before) pause = 250;
  if (!hasEnded) await wait(pause);
}
console.log();
