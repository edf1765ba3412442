"""What stands between a request's texts and vLLM's tokenizer.

first_texts: checks the tokenizer and the chat template at the start. texts: cuts what truncation drops, and
refuses what no context holds. turns: the order of all requests' texts.
"""
