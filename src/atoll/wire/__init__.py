"""Bytes <-> core messages: the .proto, generated code, conversion with limits, chunking."""
