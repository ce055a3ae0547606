// The protocol's own tests; which of them run is chosen by name, in tests/durable/run.py.
import { runConformanceTests } from "@durable-streams/server-conformance-tests"

runConformanceTests({ baseUrl: process.env.DURABLE_URL, longPollTimeoutMs: 5000 })
