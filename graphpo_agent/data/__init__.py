"""Task files, demonstrations and the generated toy worlds."""
