"""Any program that speaks OpenAI HTTP, run as a child process behind the Engine protocol."""
