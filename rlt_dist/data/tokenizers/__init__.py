"""The kinds of tokenizer, one file each; `rlt_dist.data.tokenizer` is the way in."""
