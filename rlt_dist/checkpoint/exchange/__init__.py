"""Models in and out: what `rlt-dist checkpoint export` writes and `import` reads.

An exported folder:

    model.safetensors             the parameters; above the shard size instead
    model-00001-of-00003.safetensors, ...        several files, and
    model.safetensors.index.json                 which name lies in which of them
    config.json                   the model's configuration, and its vocabulary
    tokenizer.json                the tokenizer
    README.md                     the model card

Names are those of `models`: for Transformer-XL its authors' (kimiyoung/transformer-xl), for RLT
those that this project defines. A weight that is used in two places is stored once; the files'
metadata say under `tied` which other name it answers to. `import` reads such a folder, one
safetensors file with the same names, or a state dict written by torch.save.
"""
