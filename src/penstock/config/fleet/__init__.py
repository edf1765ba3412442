"""A fleet that changes: `document` (a fleet as plain values), `changes` (what a change of each field costs),
`plan` (what differs between two fleets, and what happens when one becomes the other),
`file_text` (a model more or less in its file), `editor_schema` (for editors of its file).
"""
