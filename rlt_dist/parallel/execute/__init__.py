"""Running a schedule: one executor for all of them, and what each kind of work does to a model.

executor   carries out a stage's list from front to back
channel    hands values to the stages around it
stage      what both models' stages have in common: micro-batches and values by name
stack      Transformer-XL's work;  looped   that of the looped transformer
step       from a batch to gradients, losses and new state
"""
