"""The hardware explained by measurement: small experiments made here and now, a picture, a page of plain words."""
