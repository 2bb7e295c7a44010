"""Talk to the result of a run.

RUN ─subject─▶ run, checkpoint, or merged model, with its corpus ─dialog─▶ prompts as in training ─command─▶ answers
"""
