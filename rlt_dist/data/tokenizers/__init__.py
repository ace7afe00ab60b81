"""The kinds of tokenizer, one file each; `rlt_dist.data.tokenizers.tokenizer` is the way in."""
