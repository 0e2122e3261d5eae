// A client that ends with the number that its server has told it, or that server for one client.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { NUMBER = 7 };

static int serve(int listener)
{
    char asked[5], number = NUMBER;
    if (listen(listener, 8) != 0)
        return 2;
    fprintf(stderr, "listening\n");
    int client = accept(listener, NULL, NULL);
    if (recv(client, asked, sizeof asked, MSG_WAITALL) != sizeof asked)
        return 3;
    return write(client, &number, 1) == 1 && close(client) == 0 ? 0 : 4;
}

static int ask(int server)
{
    char number = 0;
    if (write(server, "what?", 5) != 5 || read(server, &number, 1) != 1)
        return 5;
    return number;
}

int main(int count, char **words)
{
    if (count != 4)
        return 64;
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(atoi(words[3])) };
    inet_pton(AF_INET, words[2], &at.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    int serves = strcmp(words[1], "server") == 0;
    int (*begin)(int, const struct sockaddr *, socklen_t) = serves ? bind : connect;
    if (begin(fd, (struct sockaddr *)&at, sizeof at) != 0) {
        perror(words[1]);
        return 1;
    }
    return serves ? serve(fd) : ask(fd);
}
