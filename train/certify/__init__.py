"""Certify: compare what is served with what was trained, and give one verdict.

In:  the folder of a finished run, its base model, and the merged model if there is one.
Out: a table of findings, a verdict, and an exit code. Nothing is written.
"""
