"""The web page: routes, pure view models, templates, scripts and a style sheet."""
