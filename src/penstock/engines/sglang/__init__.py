"""SGLang: its own HTTP server in a process of its own, behind the Engine protocol."""
