"""SGLang: the routes of a stock server, and the process group that it joins."""
