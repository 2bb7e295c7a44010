"""Run `python -m packcorpus`: the `packcorpus` command, also under torchrun."""

from packcorpus.tasks.cli.app import main

if __name__ == "__main__":
    main()
