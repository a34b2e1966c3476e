module vmmd-example

go 1.19
