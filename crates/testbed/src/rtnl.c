/*
 * Holds the kernel's lock of devices (RTNL) until standard input ends. An ethtool request is copied from user space
 * under that lock (dev_ethtool in net/ethtool/ioctl.c). Here it crosses into a page that is missing, and the kernel
 * waits until userfaultfd(2) provides the page.
 */
#include <fcntl.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <linux/userfaultfd.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void check(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(1);
	}
}

static void *request(void *command)
{
	struct ifreq request = { .ifr_name = "lo", .ifr_data = command };
	int socket_fd = socket(AF_INET, SOCK_DGRAM, 0);

	check(socket_fd >= 0, "socket");
	ioctl(socket_fd, SIOCETHTOOL, &request); /* It fails in the end: the features are none. */
	return NULL;
}

int main(void)
{
	long size = sysconf(_SC_PAGESIZE);
	char *pages = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *missing = pages + size;
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register range = {
		.range = { .start = (unsigned long)missing, .len = size },
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};
	struct uffdio_zeropage zero = { .range = range.range };
	__u32 set_features = ETHTOOL_SFEATURES;
	struct pollfd faults = { .fd = fd, .events = POLLIN };
	pthread_t thread;
	char byte;

	check(pages != MAP_FAILED, "mmap");
	check(fd >= 0, "userfaultfd");
	check(ioctl(fd, UFFDIO_API, &api) == 0, "UFFDIO_API");
	check(ioctl(fd, UFFDIO_REGISTER, &range) == 0, "UFFDIO_REGISTER");
	memcpy(missing - sizeof(set_features), &set_features, sizeof(set_features));
	check(pthread_create(&thread, NULL, request, missing - sizeof(set_features)) == 0, "pthread_create");
	check(poll(&faults, 1, 10 * 1000) == 1, "poll");
	puts("held");
	fflush(stdout);
	while (read(STDIN_FILENO, &byte, 1) > 0)
		;
	check(ioctl(fd, UFFDIO_ZEROPAGE, &zero) == 0, "UFFDIO_ZEROPAGE");
	pthread_join(thread, NULL);
	return 0;
}
