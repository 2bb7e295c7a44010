"""Views: render values of `tasks.inspection` and `tasks.dry_run` on a console.

In:  a value.
Out: headings, tables, and text. Data is never interpreted as markup.
"""
