"""An engine behind HTTP, with the routes and forms of the OpenAI API."""
