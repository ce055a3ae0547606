"""Shows how to catch every failure of a library in Rust or C."""

import asyncio

STEERING = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that end or cancel something and are not failures.

Any other exception from a library is a failure, also outside of `Exception`: a panic of a library
in Rust is a BaseException. So code around such a library has `except STEERING: raise`, and then
`except BaseException`.
"""
