"""Makes the folder that users download, and uploads it to the Hub when a repository is named."""
