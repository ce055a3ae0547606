"""A worker with a short time limit for templates, which keeps tests quick."""

from headrace.protocols import worker

worker.TEMPLATE_S = 0.3

if __name__ == "__main__":
    worker.main()
