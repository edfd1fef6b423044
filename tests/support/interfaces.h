/* The interfaces of a machine that is made up, for a build of the network plugin that asks these functions. */
#define _GNU_SOURCE
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>

#define UP (IFF_UP | IFF_RUNNING)

static struct {
  const char *name, *address; /* of IPv4: a number; of IPv6: its 16 bytes, or NULL for ::1 */
  unsigned flags;
  int family;
} machine[] = {
    {"lo", "\x7f\0\0\1", UP, AF_INET},      {"eth0", "\x0a\0\0\1", UP, AF_INET},
    {"eth1", "\x0a\0\0\2", IFF_UP, AF_INET}, /* no cable */
    {"eth2", "\x0a\0\0\3", 0, AF_INET},      {"docker0", "\x0a\1\0\1", UP, AF_INET},
    {"virbr0", "\x0a\2\0\1", UP, AF_INET},   {"lo", NULL, UP, AF_INET6},
    {"eth0", "\xfd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1", UP, AF_INET6},
    {"eth0", "\xfe\x80\0\0\0\0\0\0\0\0\0\0\0\0\0\1", UP, AF_INET6},
    {"eth10", "\xfd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\2", UP, AF_INET6},
};
#define COUNT (sizeof machine / sizeof *machine)

int made_up_getifaddrs(struct ifaddrs **to) {
  static struct ifaddrs all[COUNT];
  static union { struct sockaddr any; struct sockaddr_in in; struct sockaddr_in6 in6; } address[COUNT];
  for (size_t i = 0; i < COUNT; i++) {
    address[i].any.sa_family = (sa_family_t)machine[i].family;
    if (machine[i].family == AF_INET) memcpy(&address[i].in.sin_addr, machine[i].address, 4);
    else if (machine[i].address) memcpy(&address[i].in6.sin6_addr, machine[i].address, 16);
    else address[i].in6.sin6_addr = in6addr_loopback;
    all[i] = (struct ifaddrs){.ifa_next = i + 1 < COUNT ? &all[i + 1] : NULL, .ifa_name = (char *)machine[i].name,
                              .ifa_flags = machine[i].flags, .ifa_addr = &address[i].any};
  }
  *to = all;
  return 0;
}

void made_up_freeifaddrs(struct ifaddrs *all) { (void)all; }

#define getifaddrs made_up_getifaddrs
#define freeifaddrs made_up_freeifaddrs
