"""Machine: devices, memory, ranks, and signals of the machine that trains.

In:  the environment and the training settings.
Out: the device with its precision, one process per GPU, and a clean end on Ctrl-C.
"""
