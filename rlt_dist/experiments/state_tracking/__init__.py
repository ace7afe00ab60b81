"""Can a model keep track of a state beyond the lengths that it was trained on?

`recipes.py` is what is trained, as data; `corpora.py` makes what it is trained on; `run.py` trains
and scores; `score.py` tests a trained model; `results.py` shows what came of it.
"""
