// A proxy that cuts connections.

import { once } from 'node:events';
import { connect, createServer } from 'node:net';

const opened = [];

export function closeAll() {
  opened.forEach((it) => it.close());
}

// The URL of a server that listens on a free port.
export async function listening(server) {
  opened.push(server.listen(0, '127.0.0.1'));
  await once(server, 'listening');
  return `http://127.0.0.1:${server.address().port}`;
}

// Each connection removes the first number from `numBytes`, and is cut after this number of bytes of
// answers.
export function cutter(target, numBytes) {
  const { hostname, port } = new URL(target);
  return listening(
    createServer((near) => {
      const far = connect(port, hostname);
      let left = numBytes.shift() ?? Infinity;
      const end = () => (near.destroy(), far.destroy());
      near.on('data', (data) => far.write(data)).on('error', end).on('close', end);
      far.on('error', end).on('close', () => near.end()).on('data', (data) => {
        near.write(data.subarray(0, left), () => left <= 0 && near.resetAndDestroy());
        left -= data.length;
      });
    }),
  );
}
