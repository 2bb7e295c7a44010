"""Encoders: text becomes token ids, and token ids become text.

In:  the files of a SentencePiece or Hugging Face tokenizer, then texts.
Out: ids, with all matching of control tokens disabled. gigatoken is faster, and is used if it is proven equal.
"""
