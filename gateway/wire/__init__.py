"""The OpenAI wire: what bodies may say, and the bytes that answer them."""
