// Reads streams with @durable-streams/client, untouched from its package: a line of stdin names one,
// a line of stdout has all of its messages once it is closed.
import { createInterface } from "node:readline"
import { stream } from "@durable-streams/client"

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

async function read({ url, live }) {
  const items = []
  let [offset, cuts, isDone] = ["-1", 0, false]
  while (!isDone) {
    try {
      const response = await stream({ url, offset, live })
      response.subscribeJson((batch) => {
        items.push(...batch.items)
        offset = batch.offset
        isDone ||= batch.streamClosed
      })
      await response.closed
    } catch (error) {
      if (error.status >= 400 && error.status < 500) throw error
      cuts += 1 // the connection broke within a batch: read on behind the last whole one
    }
    await pause(200) // the last batch may be handed over after `closed`
  }
  console.log(JSON.stringify({ url, items, cuts }))
}

const fail = (error) => {
  console.error(error)
  process.exit(1)
}
for await (const line of createInterface({ input: process.stdin })) read(JSON.parse(line)).catch(fail)
