"""OpenAI's wire: paths, bodies, errors and server-sent events. It knows no engine and no server."""
