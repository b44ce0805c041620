"""The glossary of the course: words of distributed training, each with a page and a command."""
