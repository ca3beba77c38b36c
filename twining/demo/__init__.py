"""The bundled demo model: its files, the tasks it was trained on, and the score that states what it
can do.

`model/` is an ordinary checkpoint folder (tokenizer, chat template, weights). `tasks` makes
training and held-out examples from one source, disjoint by construction; `score` measures a model
on the held-out ones. This module imports nothing: training workers use `twining.demo.tasks` without
torch.
"""
