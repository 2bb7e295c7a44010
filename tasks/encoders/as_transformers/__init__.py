"""Load a tokenizer like AutoTokenizer of Transformers, without Transformers.

    tokenizer_config.json, config.json ─class_of─▶ class ─┐
    tokenizer.json or .model ─────────────────────────────┴─rebuild─▶ parts ─add_tokens─▶ tokenizer.json in memory

The files of a tokenizer and AutoTokenizer may encode a text differently: AutoTokenizer adds tokens of
tokenizer_config.json, and some classes keep only the vocabulary and the merges of the file. The rules are those of
Transformers 5.23 (`classes.VERSION`). A tokenizer whose class has no rule here is refused.
"""
