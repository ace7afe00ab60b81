"""The Recurrent Looped Transformer: layers, chunks, decoder, and the model that composes them."""
