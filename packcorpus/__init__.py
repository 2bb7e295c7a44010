"""Turn raw conversations into packed training rows.

    packcorpus/
      pipeline ─▶ ../pipeline    the order of the work: the Luigi graph
      tasks    ─▶ ../tasks       the work of each step, and the command line
      train    ─▶ ../train       the consumer of the rows

All code is imported by its name in this package (`packcorpus.tasks.…`), so a module of your own that is called `tasks`,
`train`, or `pipeline` never replaces ours, and ours never replaces yours.
"""
