"""How code around a library in Rust or C catches whatever that library raises."""

import asyncio

STEERING = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that end or cancel something and are no failure.

Any other exception from a library is one, also outside of `Exception`: a panic of a library in Rust
is a BaseException. So code around such a library has `except STEERING: raise`, and then
`except BaseException`.
"""
