// A fetch whose streams survive a lost connection. Give it to OpenAI's package, the AI SDK or TanStack
// AI as their option `fetch`. Node 20.6 or later, no packages.
//
//   const client = new OpenAI({ baseURL: 'http://127.0.0.1:8000/v1', fetch: resumingFetch });
//
// A POST with the same idempotency key gets the same stream again, from its start. The conversation
// id makes each byte the same, including the bytes of heartbeats.

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export async function resumingFetch(url, init) {
  if (!/"stream":\s*true/.test(init?.body)) return fetch(url, init);
  const headers = new Headers(init.headers);
  for (const name of ['Idempotency-Key', 'X-Conversation-Id']) headers.set(name, crypto.randomUUID());
  const ask = () => fetch(url, { ...init, headers });
  const first = await ask();
  if (!first.ok) return first;
  const id = first.headers.get('X-Stream-Id');
  const stop = () => fetch(new URL(`/v1/streams/${id}/cancel`, url), { method: 'POST', headers });
  return new Response(ReadableStream.from(wholeBody(first, ask, stop, init.signal)), first);
}

async function* wholeBody(first, ask, stop, signal) {
  let [response, received, hasEnded] = [first, 0, false];
  try {
    while (!hasEnded) {
      let position = 0;
      try {
        for await (const bytes of response.body) {
          position += bytes.length;
          if (position <= received) continue;
          yield bytes.subarray(Math.max(0, bytes.length - (position - received)));
          received = position;
        }
        hasEnded = true;
      } catch (lost) {
        if (signal?.aborted) throw lost;
        response = await askAgain(ask, signal);
        const [id, before] = [response, first].map((it) => it.headers.get('X-Stream-Id'));
        if (!response.ok || id !== before) throw lost;
      }
    }
  } finally {
    // With an idempotency key, the stream would continue after its client has left.
    if (!hasEnded) stop().catch(() => {});
  }
}

async function askAgain(ask, signal) {
  for (let pause = 250; ; pause = Math.min(2 * pause, 5000)) {
    await wait(pause);
    signal?.throwIfAborted();
    const response = await ask().catch(() => null);
    if (response && ![429, 503].includes(response.status)) return response;
  }
}
