// Node's ws against the WebSocket, and the examples in JavaScript.

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { test } from 'node:test';
import { promisify } from 'node:util';
import { WebSocket } from 'ws';

const url = process.env.HEADRACE_TEST_URL;
const address = `${url.replace('http', 'ws')}/v1/realtime-text`;
const run = promisify(execFile);
const long = { prompt: 'Count: 1, 2, 3,', max_tokens: 2000, ignore_eos: true };
const short = { prompt: 'one two', max_tokens: 4, temperature: 0 };

class Client {
  constructor(socket) {
    this.socket = socket;
    this.frames = [];
    this.waiting = [];
    socket.on('message', (data) => {
      this.frames.push(JSON.parse(data));
      this.waiting.forEach((look) => look());
    });
  }

  static open() {
    const socket = new WebSocket(address);
    const client = new Client(socket);
    return new Promise((resolve, reject) => {
      socket.on('open', () => resolve(client));
      socket.on('error', reject);
    });
  }

  send(message) {
    this.socket.send(JSON.stringify(message));
  }

  ask(id, body, more = {}) {
    this.send({ type: 'request', id, route: '/v1/completions', body, ...more });
  }

  until(isIt) {
    return new Promise((resolve) => {
      const look = () => {
        const found = this.frames.find(isIt);
        if (found) resolve(found);
      };
      this.waiting.push(look);
      look();
    });
  }

  end(id) {
    return this.until((it) => it.id === id && ['finish', 'error'].includes(it.event?.kind));
  }

  events(id) {
    return this.frames.filter((it) => it.id === id && it.event?.seq !== undefined);
  }
}

test('requests share a socket, one is stopped, another is read again', async () => {
  const client = await Client.open();
  client.ask('long', long);
  client.ask('short', short, { conversation_id: `ws-${process.pid}` });
  const { stream } = await client.end('short');
  await client.until((it) => it.id === 'long' && it.event?.kind === 'tokens');
  client.send({ type: 'notification', stop: 'long' });
  assert.equal((await client.end('long')).event.code, 'cancelled');
  client.send({ type: 'attach', id: 'again', stream, after: 0 });
  await client.end('again');
  const [first, ...rest] = client.events('short').map((it) => it.event);
  assert.equal(first.kind, 'accepted');
  assert.deepEqual(client.events('again').map((it) => it.event), rest);
  client.socket.close();
});

test('a bad frame is answered and the socket stays', async () => {
  const client = await Client.open();
  client.socket.send('{');
  client.socket.send(Buffer.from([0, 1]));
  client.send({ type: 'attach', id: 'none', stream: 'cmpl-0' });
  const refused = await client.until((it) => it.type === 'error' && it.id === 'none');
  assert.equal(refused.error.code, 'stream_not_found');
  assert.equal(client.frames.filter((it) => it.error?.code === 'invalid_json').length, 2);
  client.ask('short', short);
  assert.equal((await client.end('short')).event.kind, 'finish');
  client.socket.close();
});

test('the examples do what they say', async () => {
  const node = process.execPath;
  const resumed = await run(node, ['resume.mjs', url, 'Count from 1 to 20.']);
  assert.match(resumed.stdout, /18, 19, 20/);
  const prompts = ['Count from 1 to 12.', 'Spell the word banana.'];
  const shared = await run(node, ['realtime.mjs', url, ...prompts]);
  assert.match(shared.stdout, /10, 11, 12/);
  assert.match(shared.stdout, /b-a-n-a-n-a/);
});
