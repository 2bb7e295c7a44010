"""Read CSV and TSV files, and find their delimiter and encoding.

bytes ─encoding─▶ UTF-8 ─lines─▶ rows ─delimiter─▶ records
"""
