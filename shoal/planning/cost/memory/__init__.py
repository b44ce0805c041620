"""Bytes that a rank holds, tensor by tensor."""
