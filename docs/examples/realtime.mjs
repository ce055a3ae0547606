// Asks several questions at once over one WebSocket. Needs the package ws; a browser has its own.
//
//   node docs/examples/realtime.mjs http://127.0.0.1:8000 "Count to 5." "Spell cat."

const [url, ...prompts] = process.argv.slice(2);
if (!url?.startsWith('http') || !prompts.length) {
  console.error('usage: node realtime.mjs URL PROMPT [PROMPT ...], with a URL such as http://127.0.0.1:8000');
  process.exit(2);
}
const { default: WebSocket } = await import('ws'); // the usage message needs no package
const texts = Object.fromEntries(prompts.map((prompt) => [prompt, '']));
const socket = new WebSocket(`${url.replace('http', 'ws')}/v1/realtime-text`);
let open = prompts.length;

socket.on('open', () => {
  // where a key is asked for, a browser sends it first: {"type": "hello", "api_key": "…"}
  for (const prompt of prompts) {
    const body = { messages: [{ role: 'user', content: prompt }], temperature: 0 };
    const request = { type: 'request', id: prompt, route: '/v1/chat/completions', body };
    socket.send(JSON.stringify(request));
  }
});

socket.on('message', (data) => {
  const { type, id, event, error } = JSON.parse(data);
  if (type === 'error' || event?.kind === 'error') throw new Error(JSON.stringify(error ?? event));
  if (event?.kind === 'tokens') {
    for (const piece of event.pieces ?? []) texts[id] += piece.text;
  } else if (event?.kind === 'finish') {
    console.log(`${id} -> ${texts[id]}`);
    open -= 1;
    if (!open) socket.close();
  }
});
