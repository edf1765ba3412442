"""OpenAI's wire: paths, parameters, errors and server-sent events. It knows no engine and no server."""
