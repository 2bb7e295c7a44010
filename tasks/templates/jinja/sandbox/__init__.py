"""In: what a template is to render. Out: texts and located turns, from a child process of limited time and memory."""
