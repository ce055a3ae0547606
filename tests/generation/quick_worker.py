"""A worker with little patience for templates, so that tests need little too."""

from headrace.protocols import worker

worker.TEMPLATE_S = 0.3

if __name__ == "__main__":
    worker.main()
