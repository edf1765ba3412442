"""What stands between a request's texts and vLLM's tokenizer.

texts: cuts what truncation drops, refuses what no context holds. turns: the order of all requests' texts.
"""
