"""Shows how to catch every failure of a library that is written in Rust or C."""

import asyncio

STEERING = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that end or cancel something and are not failures.

Every other exception from a library is a failure. Some failures are outside of `Exception`: a panic
of a Rust library is a BaseException. So code around such a library has `except STEERING: raise`,
and then `except BaseException`.
"""
