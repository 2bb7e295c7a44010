"""Machine: devices, memory, ranks, and signals of the machine that trains.

In:  the environment and the training settings.
Out: the device and its precision, one process per GPU, and a clean exit on Ctrl-C.
"""
