"""From a row's columns to the request that its engine gets. Knows neither Ray nor an engine.

In order: `template` fills in a prompt, `builder` makes a `request`: it takes the request's columns, or a line
of an OpenAI batch file (`input_columns`), `messages` with their `media`, and `parameters`, all by `coerce` as
JSON. `form` is for payloads with files. `digest` says which requests may share an answer, and which row has
it.
"""
