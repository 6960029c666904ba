"""The commands: thin. They parse, call and print; what they call lives in the other packages."""
